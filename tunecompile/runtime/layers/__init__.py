"""One layer of a model in a training step: what finds it, what runs its calls, and what code it has."""
