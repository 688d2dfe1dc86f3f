"""Runs steps on a device: memory, the rows of running sequences, and a runner for CPUs and one for GPUs."""
