"""SGLang as an inference engine: `engine.build`.

    AsyncEngine -> SglangBackend (engine.py) -> socket (channel.py) -> host.py, a process with `sgl.Engine` -> SGLang's
    scheduler and detokenizer processes

SGLang answers the death of one of its processes by killing the process that called it and everything below. So the
caller is a process of its own, and its end is `EngineDied` here.
"""
