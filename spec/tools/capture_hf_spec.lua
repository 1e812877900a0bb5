--- tools/capture_hf.py with a real transformers: needs a Python with torch, transformers
-- and safetensors, python3 or what PYTHON names; pending without one.
local kv = require "kvlab"
local support = require "spec.support"
local temporary = require "spec.temporary"

local PYTHON = os.getenv "PYTHON" or "python3"
local ROOT = kv.paths.root
if not io.open(ROOT .. "/tools/capture_hf.py") then return end -- a bundle has no tools

--- Standard output and error of a command, and whether it succeeded.
local function run(command, ...)
  command = command:format(...)
  local pipe = io.popen(("{ %s\n} 2>&1; echo status $?"):format(command))
  local text = pipe:read "*a"
  pipe:close()
  return text, text:match "status 0%s*$" ~= nil
end

local has_python = select(2,
  run("%s -c 'import torch, transformers, safetensors'", PYTHON))
local it = has_python and it or pending

--- A folder with the config of a tiny model of random weights, made by Python code that
-- sets `config`.
local MAKE = [[%s - <<'END'
import torch, transformers
torch.manual_seed(0)
common = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, intermediate_size=32, head_dim=8)
config = %s
transformers.AutoModelForCausalLM.from_config(config).save_pretrained("%s")
END]]

describe("tools/capture_hf.py (a Python with transformers)", function()
  local folder

  before_each(function() folder = temporary.path "model" end)

  local function capture(model, more)
    return run("cd '%s' && %s tools/capture_hf.py %s %s --out %s/capture", ROOT, PYTHON,
      model, more, folder)
  end

  local function make(config)
    local text, ok = run(MAKE, PYTHON, config, folder)
    assert.is_true(ok, text)
  end

  it("writes the committed capture again", function()
    local text, ok = capture("spec/data/hf/llama",
      "--random 320 --seed 1 --dtype bfloat16")
    assert.is_true(ok, text)
    local old = kv.capture(ROOT .. "/spec/data/capture")
    local new = kv.capture(folder .. "/capture")
    assert.same({ old.tokens, old.heads, old.scale, old.dtype, #old.layers },
      { new.tokens, new.heads, new.scale, new.dtype, #new.layers })
    for i = 1, 2 do
      local want, got = old:layer(i, "cpu"), new:layer(i, "cpu")
      for _, name in ipairs { "q", "k", "v", "out" } do -- another version may round once
        support.close(got[name]:cast "f32", want[name]:cast "f32", 0.02, 0.02, name)
      end
    end
  end)

  it("takes ids of a file, some layers and another dtype", function()
    local file = temporary.file "[3, 1,\n 2, 7]"
    local text, ok = capture("spec/data/hf/qwen3",
      "--layers 1 --dtype float32 --tokens 3 --ids " .. file)
    assert.is_true(ok, text)
    local c = kv.capture(folder .. "/capture")
    assert.same({ { 1 }, 3, 3, 1, 64, "f32" },
      { c.layers, c.tokens, c.heads, c.kv_heads, c.head_dim, c.dtype })
    assert.is_true(select(2, c:replay({ device = "cpu" }):run(kv.policy "full"))
      < 1e-5)
  end)

  it("refuses windows shorter than the text, and takes them where they are longer",
    function()
      make "transformers.MistralConfig(**common, sliding_window=16)"
      local text, ok = capture(folder, "--random 17")
      assert.is_false(ok)
      assert.matches("layer 0 has a sliding window of 16 tokens and a text of 17", text)
      assert.is_true(select(2, capture(folder, "--random 16")))
    end)

  it("refuses soft caps and sinks", function()
    make "transformers.Gemma2Config(**common, attn_logit_softcapping=50.0)"
    assert.matches("layer 0 has a softcap, which a capture cannot hold",
      (capture(folder, "--random 8")))
    assert.is_nil(io.open(folder .. "/capture/manifest.json"))
  end)

  it("refuses ids that the model does not have, and layers that it does not have",
    function()
      local text = capture("spec/data/hf/llama", "--random 8 --layers 0,2")
      assert.matches("layers %[0%] went through .*expected %[0, 2%]", text)
      text = capture("spec/data/hf/llama", "--ids " .. temporary.file "3 128")
      assert.matches("2 token ids, expected some, each from 0 to 127", text)
    end)
end)
