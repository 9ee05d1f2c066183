"""Products of few rows (1 to 64) with frozen weights, which are read once, where they are: dense, NF4, FP4 or MXFP4.

A token's step of a rollout reads every weight once for 8 rows or so. Dequantising first would move 9 times the bytes:
4 bits are read, 16 written and 16 read; dense siblings would be copied to where their adapters stand beside them. Here
a program unpacks a tile of weights into the operand of a tensor core's product, with the rows of x as its other side.
The levels are bf16; a block's fp32 scale multiplies its sums, MXFP4's power of two the levels.

A tensor core wants the operand spread over threads in pairs: thread t of four holds the columns 2t, 2t + 1, 2t + 8 and
2t + 9 of each 16. A thread has 16 weights of each 64 that lie side by side instead. Sums do not mind the order of their
terms: so columns are taken in the order of the threads, and x is given in that order (`in_order`). No weight changes
its thread.

Looking a level up in a table of 16 costs a load or a tree of selects. Bytes of a register can be permuted by another
one's nibbles (`prmt`): four weights at once, with the low and the high bytes of the levels in four registers each.

The columns are split into parts, so that even a narrow product fills the GPU. `finish` adds them, in a fixed order, and
the adapters: two launches for weights that share their input (QLoRA, https://arxiv.org/abs/2305.14314).

Of experts' stacks those matrices are read that have rows (`experts`): of a hundred a handful."""
