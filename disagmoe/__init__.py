"""Training of mixture-of-experts models with attention and FFN disaggregated: specs, costs, plans, simulation."""
