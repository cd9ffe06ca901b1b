"""Arrays in, arrays out: advantages, baselines, ratios, surrogates, divergences and whole losses."""
