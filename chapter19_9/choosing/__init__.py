"""Given a model and machines, what to start with (19.9.12): what a step costs, ways weighed, and how an answer is told."""
