"""Plans: the order of samples as a function of (seed, epoch, position), and the cursor that says where a consumer is.

A plan is immutable. Bound to an epoch it is an `EpochPlan`, which answers for any position. Who reads it holds the
`Cursor`, and a `PlanReader` moves that from epoch to epoch.
"""
