"""What people use around a run; nothing in here is needed by one."""
