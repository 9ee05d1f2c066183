"""How tunecompile is switched on: the public functions (`api`), and a door for each trainer of other people's."""
