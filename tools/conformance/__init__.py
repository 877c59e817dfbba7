"""Other people's test suites against a served SmolLM2, one file a suite: what passes, what fails,
what is left out.
"""
