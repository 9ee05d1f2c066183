"""One file for each foreign package whose models, hooks or engines we work with."""
