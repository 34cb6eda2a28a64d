"""Settings: one frozen model, read from TOML, ``LME_*`` variables and flags."""
