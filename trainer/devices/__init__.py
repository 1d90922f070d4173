"""What several devices share and add up while heads are trained."""
