"""ms-swift imports this file by its path, and puts its folder first on Python's path: nothing else stands here."""

from tunecompile.trainers.swift import register

register()
