"""Files, checks of arguments, signals, sizes, float64: what every room stands on."""
