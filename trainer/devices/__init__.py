"""What devices hold, share and add up while heads are trained."""
