"""Third-party test suites against a served SmolLM2, one file per suite."""
