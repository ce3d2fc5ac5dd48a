"""Reshard."""
