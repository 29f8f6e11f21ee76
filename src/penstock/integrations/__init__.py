"""What other libraries need to work with ours without noticing. Nothing here imports them before they are used."""
