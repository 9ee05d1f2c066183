"""`optimize(warmup="background")`: the first steps run op by op, and regions change over when their code is there."""
