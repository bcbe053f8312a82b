"""The console command `roll`: one module per group of subcommands, each with `add_to(parsers)`."""
