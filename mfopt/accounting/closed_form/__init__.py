"""Accounts in closed form: no grid, no sampling."""
