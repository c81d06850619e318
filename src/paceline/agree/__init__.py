"""Do replicas still agree? Digests of their state, the search for what drifted, and capsules of failed steps."""
