"""What tests of whole clusters stand on: scenes, faults, workloads, and their checker."""
