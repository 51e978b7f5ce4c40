"""The store on a commit log: opening, recovery, checkpoints, retention, repairs."""
