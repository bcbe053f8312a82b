"""Workers: thin classes that wire a strategy to the cluster API. One class per kind of role."""
