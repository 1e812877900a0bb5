--- What does a KV cache hold while a model generates? The program reads a prompt of four
-- tokens and then generates one token at a time. It is the smallest whole program that
-- uses kvlab; its model is lua/models/small_lm.lua.
--
--   ./kvlab run lua/experiments/00_cached_lm.lua
local kv = require "kvlab"
local small_lm = require "models.small_lm"

local VOCAB, GENERATE = 1024, 3

local function shape(t) return "[" .. table.concat(t:dims(), ", ") .. "]" end

local lm = small_lm.new { vocab_size = VOCAB, embed_dim = 128, num_heads = 4,
                          seed = kv.command_line.seed }
local prompt = kv.randint(kv.device "cpu", "i32", { 4 },
  { high = VOCAB, seed = kv.command_line.seed })
print("prompt", shape(prompt), table.concat(prompt:list(), " "))

local input = prompt:list()
for i = 1, GENERATE do
  local token = lm:forward(input):argmax():item()
  local k, v = lm:cached()
  print(("token %d is %d; k_cache %s, v_cache %s, in %d block(s)"):format(i, token,
    shape(k), shape(v), lm.sequence:blocks()))
  input = { token }
end
