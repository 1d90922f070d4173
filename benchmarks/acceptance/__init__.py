"""What drafts are worth: acceptance lengths, whatever the machine."""
