"""`tunecompile monitor`: what the training processes of this machine are doing, and what they hold."""
