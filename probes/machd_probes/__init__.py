"""The prober: measures what each architecture can do through machd's own engine."""
