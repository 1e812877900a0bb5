--- A tokenizer with a token for each character, and a folder as Hugging Face has it with
-- a small random model and this tokenizer, for specs that need text but no real model.
local files = require "kvlab.files"
local json = require "kvlab.json"
local kv = require "kvlab"
local temporary = require "spec.temporary"

local M = {}

local function write(path, text)
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
end

--- A chat template, in the form that most models have.
M.CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + "
  .. "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}"
  .. "{{ '<|im_start|>assistant\n' }}{% endif %}"

--- Writes the files of a tokenizer: printable ASCII, then pairs of letters, which no text
-- is encoded to, and at the end the two special tokens of ChatML.
---@param folder string
---@param vocab integer  97 or more
---@return string folder
function M.write_tokenizer(folder, vocab)
  local tokens = {}
  for i = 0, 94 do tokens[string.char(32 + i)] = i end
  for i = 95, vocab - 3 do
    tokens[string.char(97 + math.floor((i - 95) / 26), 97 + (i - 95) % 26)] = i
  end
  write(folder .. "/tokenizer.json", json.encode {
    model = { type = "BPE", vocab = tokens, merges = json.array {} },
    decoder = { type = "Fuse" },
    added_tokens = { { id = vocab - 2, content = "<|im_start|>", special = true },
                     { id = vocab - 1, content = "<|im_end|>", special = true } },
  })
  write(folder .. "/tokenizer_config.json", json.encode { eos_token = "<|im_end|>",
    chat_template = M.CHATML })
  return folder
end

--- A tokenizer of so many tokens.
---@param vocab integer
function M.tokenizer(vocab)
  return kv.tokenizer(M.write_tokenizer(temporary.folder(), vocab))
end

--- A folder with a random Llama of 128 tokens and its tokenizer.
---@return string folder
function M.folder()
  local folder = M.write_tokenizer(temporary.folder(), 128)
  for _, name in ipairs { "config.json", "model.safetensors" } do
    write(folder .. "/" .. name, files.read(kv.paths.root .. "/spec/data/hf/llama/"
      .. name))
  end
  return folder
end

return M
