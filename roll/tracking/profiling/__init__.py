"""Where the time and the memory of a step go: traces that Perfetto opens, tables, spans for OpenTelemetry."""
