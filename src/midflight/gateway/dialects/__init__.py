"""Wire formats: each turns a JSON body into a `CompletionCall`, and events into JSON. Nothing here waits."""
