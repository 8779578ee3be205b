"""Figures of results: each function takes what a search returned, or `load_run` read, and returns a plotly figure."""

from autoq.display.plots import cache_formats, damage, front, history, importances, memory, predicted_measured, recipe, sensitivity

__all__ = ["cache_formats", "damage", "front", "history", "importances", "memory", "predicted_measured", "recipe", "sensitivity"]
