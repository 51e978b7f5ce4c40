"""Harness of tests of whole clusters: scenes, faults, workloads, and their checker."""
