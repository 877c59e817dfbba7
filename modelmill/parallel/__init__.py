"""Tensor parallelism: sharding, rendezvous of the ranks and collectives."""
