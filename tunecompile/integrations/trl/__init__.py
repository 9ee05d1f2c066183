"""TRL's trainers."""

from tunecompile.integrations.trl.fused_head import (
    OUTPUTS,
    ScoreCall,
    Scores,
    fused_head,
    home_of_forward,
    home_of_replacement,
    requests_scores,
    with_scores,
)
from tunecompile.integrations.trl.same_scores import same_scores
