--- Which policies keep the attention of a real model, at which budget?
--
-- The queries, keys and values of a Hugging Face model, written by tools/capture_hf.py
-- (docs/capture.md), are replayed without the model. The last tokens of the text are
-- decoded under each policy. Each layer's output is compared with dense attention
-- (output_error, attention_mass) and with the model's own output (model_error). Policies
-- that watch the prompt (h2o_blocks, snapkv_blocks) get its queries too, and so do
-- policies that evict tokens of the text for good (tova, snapkv). For these it is not
-- known what dense attention would give, so only model_error says what they lose. Tables
-- show in brackets what was read, bytes_share, and pictures have it on the x axis;
-- --over=held_share shows what was held (docs/experiments.md).
--
--   ./kvlab run lua/experiments/12_captured.lua --set capture=FOLDER [--device=cuda]
--                                               [--set decode=128] [--set block_size=32]
--
-- The default capture has 320 tokens of a model with random weights (spec/data/capture).
-- It only serves as a test, because such a model attends about equally to everything.
local kv = require "kvlab"

--- Opens the capture and prints its shape.
local function open(settings)
  local folder = settings.capture
  if folder == "sample" then folder = kv.paths.root .. "/spec/data/capture" end
  local capture = kv.capture(folder)
  print(("%s: %d layers, %d tokens, %d query heads on %d KV heads of %d, %s"):format(
    capture.model, #capture.layers, capture.tokens, capture.heads, capture.kv_heads,
    capture.head_dim, capture.dtype))
  settings.capture_tokens = capture.tokens
  settings.replay = capture:replay { decode = settings.decode,
                                     block_size = settings.block_size }
end

local function policy_of(config)
  return kv.policy(config.policy, config.policy ~= "full" and
    { ratio = config.budget, sink = 1, recent = 2, min_blocks = 0 } or nil)
end

local function run(config, settings)
  local policy = policy_of(config)
  local probe, model_error = settings.replay:run(policy, kv.probe)
  local metrics = probe:metrics()
  metrics.note = kv.policy.note(policy,
    math.ceil((settings.capture_tokens - config.decode) / config.block_size),
    config.block_size)
  metrics.model_error = model_error
  return metrics
end

kv.experiment.run {
  name = "12_captured",
  title = "Which policies keep the attention of a captured model, at which budget?",
  grid = {
    { "policy", kv.policy.names("decode", { "full", "mass_oracle", "oracle" }) },
    { "budget", { 0.05, 0.1, 0.2, 0.5 },
      when = function(config) return config.policy ~= "full" end },
  },
  defaults = { capture = "sample", decode = 32, block_size = 16 },
  kinds = kv.experiment.kinds {
    count = { "decode", "block_size" }, share = { "budget" }, text = { "capture" },
  },
  quick = { decode = 4 },
  metrics = { "output_error", "attention_mass", "model_error", "blocks_read",
              "bytes_read", "bytes_share", "held_share", "moved_share" },
  setup = open,
  teardown = function(settings) if settings.replay then settings.replay:close() end end,
  check = policy_of, run = run,
  table = {
    { rows = "policy", columns = "budget", value = "output_error",
      beside = "bytes_share", format = "%.4f" },
    { rows = "policy", columns = "budget", value = "attention_mass",
      beside = "bytes_share", format = "%.4f" },
    { rows = "policy", columns = "budget", value = "model_error",
      beside = "bytes_share", format = "%.4f" },
    { front = "attention_mass", over = "bytes_share", format = "%.4f" },
  },
  plot = {
    { x = "bytes_share", y = "output_error", series = "policy", logx = true,
      title = "Captured model: error of the output over {over}",
      ylabel = "relative error" },
    { x = "bytes_share", y = "attention_mass", series = "policy", logx = true,
      front = true, title = "Captured model: attention kept over {over}",
      ylabel = "share of the attention mass" },
    { x = "bytes_share", y = "model_error", series = "policy", logx = true,
      title = "Captured model: distance from the model's output over {over}",
      ylabel = "relative distance" },
    { x = "budget", y = "output_error", series = "policy", logx = true,
      title = "Captured model: error of the output by budget",
      xlabel = "budget asked for (share of blocks)",
      ylabel = "relative error" },
  },
}
