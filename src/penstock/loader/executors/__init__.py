"""The executors of a loader: inline, threads, processes, Ray. Each makes batches; the window asks for them."""
