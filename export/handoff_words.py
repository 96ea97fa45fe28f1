"""The words of a handoff's README in English and in Chinese. Templates only; `handoff_readme.py` fills them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Words:
    """One language. In `page` and others, names in braces are filled in."""

    page: str
    graph: str
    inputs: str
    outputs: str
    shape: str
    type: str
    meaning: str
    roles: dict[str, str]  # of an input or output -> what it is; split_: where the head is a graph
    host_parts: dict[str, str]  # role, as above -> what the host does for it, said where a graph has it
    files: dict[str, str]
    file_kinds: dict[str, str]  # suffix -> what such a file is
    calibrations: dict[str, str]  # format -> how samples lie there
    head: str  # heading of the graph of the head
    third: str  # said of it first
    several_graphs: str
    window: str
    no_tool: str
    example: str
    tokens: str
    row: str
    visible: str
    hidden: str
    after: str


ENGLISH = Words(
    page="""# {model} for {target}

Two kinds of static ONNX graphs and one rolling cache: a prompt goes through {prefill} chunk by chunk, then every
new token through {decode}.{third} Every dimension is a number. This page is the contract of exactly these files;
`handoff.json` has the same for programs. Chinese: README.zh.md.

| | |
|---|---|
| target | {target}: {title} |
| tool | {tool} |
| precision that the tool is asked for | {precision} |
| L, longest prompt | {L} tokens |
| c, rows of the largest prefill run | {c} |
| C, key slots that a query can see, its own run included | {C} |
| layers, vocabulary, positions | {layers}, {vocab}, {positions} |
| cache layout, type of graphs' floats | `{layout}`, {dtype} |
| mask | 0 visible, {mask_value} hidden, nothing else |
| BOS, EOS ids | {bos}; {eos} |

## Quick start

    sha256sum -c SHA256SUMS            # the folder is whole
    python replay.py --onnxruntime     # the graphs give the golden vectors (needs onnxruntime)
    python build.py                    # compile, in the tool's own environment; --help says more
    python build.py --simulate         # then run the golden inputs, where the tool has a simulator
    python replay.py build/outputs     # what came out, here or on the board, against the golden vectors

## Files

| file | |
|---|---|
{files}

## Graphs

{graphs}
Each past input and the new output of the same layer share one cache ({pairs} pairs, `kv_pairs` in `handoff.json`);
give both the same quantisation scale, or the scale drifts with every roll.

## What the host does

P is the number of real tokens that went through so far. c is the rows of the graph that runs.

1. **Align.** A prompt of n tokens needs ceil(n / c) runs. The p = ceil(n / c) * c - n rows too many are pads, all
   at the left of the first run: id 0 (zero rows of embeddings). Real tokens follow from row p on. Count tokens;
   never look for a pad id.
2. **Positions.** A pad has position 0. Row p + i has position P + i.
3. **Mask.** Additive, 0 or {mask_value}. In a run of c rows of which p are pads, slot j < C - c holds position P -
   (C - c) + j (negative: nothing yet, hidden); the next p slots are the pads (hidden); slot C - c + p + i holds
   position P + i. Row p + i sees the slot of position k when 0 <= k <= P + i. Rows of pads see nothing; what they
   compute is finite and means nothing.{window}
4. **Run.** All past inputs hold the last C slots, right-aligned: the newest token in the last slot. Slots never
   written are zero and hidden. Inside, the graph takes the last C - c of them and its own c.
5. **Roll.** `cache = concat(cache, new[p:])[-C:]` along the slot axis: axis {key_axis} of keys, axis {value_axis}
   of values.
6. **First token.** The last row of the last run is the last real token; its logits give the next one.
7. **Decode** is the same with c = 1 and p = 0: feed the token, position P, roll one slot.
8. **Which graph.** The padded run comes first in a prompt or turn, full runs follow. A run with pads only while P +
   c <= C (here P <= {last} for c = {c}); later the remainder goes through the decode graph.
9. **Full.** At P = C stop, or go on and forget the oldest slot with each token. A prompt of n tokens can generate C -
   n + 1 tokens. Positions end at {positions}.{several}{host}

## Example: a first chunk with pads

{example}

## Calibration samples

Taken from the chunk loop itself over the text that was given, with real past keys and values: first chunks with
pads and BOS, full first chunks, partly filled caches, full caches. Decode steps take the text's next token. Format
`{format}`: {calibration}
Paths in a list are relative to this folder: run the tool from here.

{samples}

## Golden vectors

`<path>/inputs/<name>.npy` and `<path>/outputs/<name>.npy`, by {golden_by}. Feed the inputs as they are, write each
output as `OUTPUTS/<graph>/<k>/<name>.npy`, or as .bin or .raw of float32 or float16, then run `replay.py`. It wants
of each output a cosine of at least {cosine} and a relative difference of at most {relative} (`--cosine X` for another
bound; a quantised build needs a lower one), leaves the rows of pads out, and names the first tensor that diverges,
layer by layer. Axes of four-dimensional outputs moved by the tool: `--layout nhwc`.

{golden}

## Build

`build.py` (`{script}` of rollkv) runs as it stands from this folder; `python build.py --help` says what it takes.
Known of this target, with the source of each; the licence of the tool governs its use:

{notes}
""",
    graph="### `{file}`: {rows} rows, {kv_len} slots, opset {opset}",
    head="### `{file}`: the head, one row, no cache, opset {opset}",
    third=" A third, `{head}`, makes logits of the hidden state that they give for their last row.",
    inputs="input",
    outputs="output",
    shape="shape",
    type="type",
    meaning="what",
    roles={
        "ids": "token ids, 0 for pads",
        "embeds": "embeddings of the tokens, zero rows for pads",
        "per_layer_inputs": "per-layer embeddings, zero rows for pads",
        "attention_mask": "additive mask of layers without a window",
        "sliding_attention_mask": "additive mask of layers with a window",
        "position_ids": "positions, 0 for pads",
        "rope_cos": "cos of the rotary angles of each row's position",
        "rope_sin": "sin of the rotary angles of each row's position",
        "rope_query_scale": "factor on queries, by position",
        "past_key": "cached keys of layer {layer}",
        "past_value": "cached values of layer {layer}",
        "new_key": "keys of this run, layer {layer}, rotated",
        "new_value": "values of this run, layer {layer}",
        "logits": "logits",
        "hidden_states": "hidden state of the last row; the host multiplies it with the head",
        "split_hidden_states": "hidden state of the last row, after the final norm: what `{head}` takes",
    },
    host_parts={
        "embeds": "**Embeddings** are looked up on the host: `manifest.embedding` in `handoff.json` names the "
        "table's "
        "file, shape, type and scale (multiply each row by it, in float32).",
        "rope_cos": "**cos, sin** are fed: angle i of position p is float32(p) * float32(inv_freq[i]), the product "
        "rounded to float32 as in the model's own code (an exact one is another angle far out); cos and sin of it, in "
        "float32 or better, times attention_scaling; the row holds the rotary_dim / 2 numbers twice. `manifest.rope` "
        "has them.",
        "rope_query_scale": "**Query scale**, fed: 1 + beta ln(1 + floor(p / length)), as `query_scale` of "
        "`manifest.rope` says.",
        "hidden_states": "**Head.** logits = hidden state @ head table, transposed, plus `manifest.head_bias`, times "
        "`logit_scale`, soft-capped by `logit_softcap`, as far as given; `manifest.head_table` names the file.",
        "split_hidden_states": "**Head.** After the last run of a prompt, and after every decode step, feed "
        "`hidden_states`, the hidden state of the run's last row, as it came out to `{head}`: it gives the `logits` "
        "that point 6 speaks of. After the runs before it nothing is fed to it.",
    },
    files={
        "handoff.json": "this page for programs",
        "README.md": "this page",
        "README.zh.md": "this page in Chinese",
        "SHA256SUMS": "checksums of all other files",
        "replay.py": "compares outputs with the golden vectors",
        "build.py": "build script for the tool",
        "jobs.py": "what every build script shares",
        "weights.bin": "external data of all graphs; keep it beside them",
        "embedding.bin": "embedding table for the host",
        "calibration/": "calibration samples",
        "golden/": "golden vectors",
    },
    file_kinds={
        ".onnx": "graph",
        ".json": "tokenizer or generation settings",
        ".jinja": "chat template",
        ".bin": "host table",
    },
    calibrations={
        "rknn": "`<sample>/<input>.npy`; each line of `dataset.txt` has the paths of all inputs of one sample, in "
        "the "
        "graph's order, separated by spaces.",
        "qnn": "`<sample>/<input>.raw`, float32 or int32, little-endian; each line of `input_list.txt` has "
        "`name:=path` of every input, separated by spaces.",
        "sophgo": "`<sample>.npz`, the arrays by input name.",
        "axera": "one `<input>.tar` for each input, in it `<sample>.npy`.",
        "horizon": "one folder `<input>/` for each input, in it `<sample>.npy`.",
        "npz": "`<sample>.npz`, the arrays by input name.",
    },
    several_graphs="   With several graphs of a role: rows as suits the tokens that are left; of graphs with the "
    "same rows the "
    "one with the fewest slots C' while P + c <= C'. It takes the last C' slots of each cache.",
    window="   In a layer with a window of W = {W}: also P + i - k < W, and its cache has as many slots as its past "
    "input.",
    no_tool="no single public tool",
    example="`{file}`, a prompt of {real} tokens: {rows} rows, p = {pads}, P = 0. Fed are (all past inputs are "
    "zero):\n",
    tokens="tokens",
    row="row",
    visible="0 in slots {first} .. {last} ({count}), hidden elsewhere",
    hidden="all hidden",
    after="Rows {pads} .. {last} of each new key and value go to the cache's slots {first} .. {slots}; then P = "
    "{real}. "
    "(These are the inputs of the golden run; compare yours with them.)",
)

CHINESE = Words(
    page="""# {model}，目标平台 {target}

两类静态 ONNX 图和一个滚动缓存：提示词按块依次通过 {prefill}，之后每个新 token 通过 {decode}。{third}
所有维度都是固定数字。本页就是这些文件的约定；程序可读的同样内容在 `handoff.json`。英文版：README.md。

| | |
|---|---|
| 目标平台 | {target}：{title} |
| 工具 | {tool} |
| 要求工具采用的精度 | {precision} |
| L，最长提示词 | {L} 个 token |
| c，最大的 prefill 图一次运行的行数 | {c} |
| C，一个 query 能看到的 key 槽位数（含本次运行） | {C} |
| 层数、词表大小、位置数 | {layers}、{vocab}、{positions} |
| 缓存布局、图的浮点类型 | `{layout}`、{dtype} |
| 掩码 | 0 可见，{mask_value} 隐藏，没有其他值 |
| BOS、EOS id | {bos}；{eos} |

## 快速开始

    sha256sum -c SHA256SUMS            # 检查文件夹是否完整
    python replay.py --onnxruntime     # 用 onnxruntime 复现 golden 向量
    python build.py                    # 在工具自己的环境中编译；参数见 --help
    python build.py --simulate         # 然后用 golden 输入仿真（工具有仿真器时）
    python replay.py build/outputs     # 把仿真或板端的输出与 golden 向量比较

## 文件

| 文件 | |
|---|---|
{files}

## 计算图

{graphs}
同一层的 past 输入与 new 输出共用一个缓存（共 {pairs} 对，见 `handoff.json` 的 `kv_pairs`）；两者必须使用同一个量化
scale，否则每滚动一次误差都会累积。

## 主机端要做的事

P 是到目前为止已经通过的真实 token 数。c 是当前运行的图的行数。

1. **对齐。** n 个 token 的提示词需要 ceil(n / c) 次运行。多出的 p = ceil(n / c) * c - n 行是填充，
   全部在第一次运行的左侧：id 为 0（输入 embedding 时为全零行）。真实 token 从第 p 行开始。请按数量计算，不要靠 id
   判断是否为填充。
2. **位置。** 填充行的位置为 0；第 p + i 行的位置为 P + i。
3. **掩码。** 加性掩码，取值 0 或 {mask_value}。一次 c 行、其中 p 行为填充的运行中，槽位 j < C - c 存放位置 P - (C -
   c) + j（负数表示尚未写入，隐藏）；接下来 p 个槽位是填充（隐藏）；槽位 C - c + p + i 存放位置 P + i。当 0 <= k <=
   P + i 时，第 p + i 行能看到位置 k 的槽位。填充行什么都看不到；它们的计算结果是有限值，但没有意义。{window}
4. **运行。** 所有 past 输入存放最近 C 个槽位，右对齐：最新的 token 在最后一个槽位。从未写入的槽位为零并且隐藏。
   图内部使用其中最后 C - c 个槽位和自己的 c 个。
5. **滚动。** 沿槽位轴 `cache = concat(cache, new[p:])[-C:]`：key 的轴 {key_axis}，value 的轴 {value_axis}。
6. **第一个 token。** 最后一次运行的最后一行就是最后一个真实 token；它的 logits 给出下一个 token。
7. **Decode** 相同，只是 c = 1、p = 0：输入该 token、位置 P，滚动一个槽位。
8. **何时用哪个图。** 带填充的运行总是提示词或一轮对话的第一次运行，之后都是满的运行。只有当 P + c <= C
   时才能使用带填充的运行（此处 c = {c} 时 P <= {last}）；否则剩余 token 通过 decode 图。
9. **缓存满。** P = C 时停止，或者每来一个 token 就丢掉最旧的槽位继续。n 个 token 的提示词可以生成 C - n + 1 个
   token。位置上限为 {positions}。{several}{host}

## 示例：带填充的第一块

{example}

## 校准样本

样本来自对给定文本真实运行的分块循环，past key/value 都是真实值：带填充和 BOS 的第一块、满的第一块、部分填充的缓存、
填满的缓存。decode 步取文本的下一个 token。格式 `{format}`：{calibration}
列表中的路径相对于本文件夹：请在此文件夹中运行工具。

{samples}

## Golden 向量

`<路径>/inputs/<名字>.npy` 和 `<路径>/outputs/<名字>.npy`，由 {golden_by} 计算。原样输入，把每个输出写成
`OUTPUTS/<graph>/<k>/<name>.npy`，或 float32/float16 的 .bin、.raw，然后运行 `replay.py`。它要求每个输出的余弦相似度
不低于 {cosine}，相对误差不高于 {relative}（用 `--cosine X` 修改；量化后的模型需要更低的界），不比较填充行，
并逐层指出第一个发散的张量。如果工具移动了四维输出的轴：`--layout nhwc`。

{golden}

## 编译

`build.py`（即 rollkv 的 `{script}`）在本文件夹中可直接运行；`python build.py --help` 说明其参数。
关于该目标平台的已知事项及来源如下；工具的使用受其自身许可证约束：

{notes}
""",
    graph="### `{file}`：{rows} 行，{kv_len} 个槽位，opset {opset}",
    head="### `{file}`：head，一行，没有缓存，opset {opset}",
    third="第三个图 `{head}` 由它们给出的最后一行的隐藏状态计算 logits。",
    inputs="输入",
    outputs="输出",
    shape="形状",
    type="类型",
    meaning="说明",
    roles={
        "ids": "token id，填充为 0",
        "embeds": "token 的 embedding，填充为全零行",
        "per_layer_inputs": "逐层 embedding，填充为全零行",
        "attention_mask": "无窗口层的加性掩码",
        "sliding_attention_mask": "有窗口层的加性掩码",
        "position_ids": "位置，填充为 0",
        "rope_cos": "各行位置的旋转角的 cos",
        "rope_sin": "各行位置的旋转角的 sin",
        "rope_query_scale": "按位置作用于 query 的系数",
        "past_key": "第 {layer} 层缓存的 key",
        "past_value": "第 {layer} 层缓存的 value",
        "new_key": "第 {layer} 层本次运行的 key，已旋转",
        "new_value": "第 {layer} 层本次运行的 value",
        "logits": "logits",
        "hidden_states": "最后一行的隐藏状态；由主机与 head 相乘",
        "split_hidden_states": "最后一行经过最终 norm 的隐藏状态：`{head}` 的输入",
    },
    host_parts={
        "embeds": "**Embedding** 由主机查表：`handoff.json` 的 `manifest.embedding` 给出表的文件、形状、类型和 "
        "scale（用 float32 乘到每一行）。",
        "rope_cos": "**cos、sin** 由主机输入：位置 p 的第 i 个角为 float32(p) * float32(inv_freq[i])，"
        "乘积按模型自身代码舍入到 float32（位置很大时精确乘积是另一个角）；以 float32 或更高精度取 cos、sin 后乘以 "
        "attention_scaling；每行把这 rotary_dim / 2 个数写两遍。见 `manifest.rope`。",
        "rope_query_scale": "**Query 系数**由主机输入：1 + beta ln(1 + floor(p / length))，见 `manifest.rope` 的 "
        "`query_scale`。",
        "hidden_states": "**Head。** logits = 隐藏状态 @ head 表的转置，再按 manifest 中给出的 `head_bias`、"
        "`logit_scale`、`logit_softcap` 处理；文件见 `manifest.head_table`。",
        "split_hidden_states": "**Head。** 提示词的最后一次运行之后，以及每个 decode 步之后，把输出的 `hidden_states`"
        "（该次运行最后一行的隐藏状态）原样输入 `{head}`，它给出第 6 条所说的 `logits`。此前的各次运行不需要 head。",
    },
    files={
        "handoff.json": "程序可读的约定",
        "README.md": "本页的英文版",
        "README.zh.md": "本页",
        "SHA256SUMS": "其他所有文件的校验和",
        "replay.py": "把输出与 golden 向量比较",
        "build.py": "该工具的编译脚本",
        "jobs.py": "各编译脚本的公共部分",
        "weights.bin": "所有图的外部数据；必须与图放在一起",
        "embedding.bin": "主机用的 embedding 表",
        "calibration/": "校准样本",
        "golden/": "golden 向量",
    },
    file_kinds={".onnx": "计算图", ".json": "分词器或生成设置", ".jinja": "对话模板", ".bin": "主机用的表"},
    calibrations={
        "rknn": "`<样本>/<输入>.npy`；`dataset.txt` 每行是一个样本所有输入的路径，按图的输入顺序，以空格分隔。",
        "qnn": "`<样本>/<输入>.raw`，float32 或 int32，小端；`input_list.txt` 每行是每个输入的 `name:=path`，"
        "以空格分隔。",
        "sophgo": "`<样本>.npz`，数组以输入名命名。",
        "axera": "每个输入一个 `<输入>.tar`，其中为 `<样本>.npy`。",
        "horizon": "每个输入一个文件夹 `<输入>/`，其中为 `<样本>.npy`。",
        "npz": "`<样本>.npz`，数组以输入名命名。",
    },
    several_graphs="   同类图有多个时：行数按剩余 token 选择；行数相同的图中，只要 P + c <= C'，就用槽位数 C' "
    "最小的那个。它使用每个缓存最后 "
    "C' 个槽位。",
    window="   窗口 W = {W} 的层还要求 P + i - k < W，其缓存的槽位数与它的 past 输入相同。",
    no_tool="没有公开的单一工具",
    example="`{file}`，{real} 个 token 的提示词：{rows} 行，p = {pads}，P = 0。输入如下（所有 past 输入为零）：\n",
    tokens="token",
    row="行",
    visible="槽位 {first} .. {last}（{count} 个）为 0，其余隐藏",
    hidden="全部隐藏",
    after="每个 new key 和 value 的第 {pads} .. {last} 行写入缓存的槽位 {first} .. {slots}；之后 P = {real}。"
    "（以上就是该 golden 运行的输入，"
    "可与你的输入对照。）",
)
