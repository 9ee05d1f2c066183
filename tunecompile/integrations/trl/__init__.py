"""TRL's trainers."""

from tunecompile.integrations.trl.fused_head import (
    OUTPUTS,
    ScoreCall,
    Scores,
    fused_head,
    home_of_forward,
    home_of_replacement,
    requests_scores,
    same_scores,
    with_scores,
)
