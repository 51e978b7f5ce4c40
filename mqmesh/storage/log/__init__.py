"""The commit log: segments, their records, maps, room on the disk, and one reader."""
