"""Padding is removed before the layers and restored behind them."""
