"""Optuna's part: recipes near the exact solution, measured for real, by one process or by many."""
