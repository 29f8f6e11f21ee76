"""Plans: the order of samples as a function of (seed, epoch, position), and the cursor of a consumer.

A plan is immutable. `Plan.bind` returns an `EpochPlan`: one epoch, with random access to any position. A `PlanReader`
holds the `Cursor` of one consumer, and moves it from epoch to epoch.
"""
