from roll.api.run import check as check
from roll.api.run import load_run as load_run
from roll.api.run import resume as resume
from roll.api.run import train as train
from roll.configs.catalog.stage_table import needs as needs
from roll.configs.catalog.stage_table import stage as stage
from roll.pipelines.run.run_result import RunResult as RunResult
from roll.tracking.recorded_responses import RecordedRollouts as RecordedRollouts
from roll.tracking.recorded_responses import rollouts as rollouts

__version__: str
