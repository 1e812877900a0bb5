--- The words that tasks are made of: nouns and adjectives, for keys and lists, and parts
-- of unimportant sentences. No thing occurs in the sentences, so a sentence never looks
-- like a needle.
local M = {}

local function list(text)
  local words = {}
  for word in text:gmatch "[^%s]+" do words[#words + 1] = word end
  return words
end

local function lines(text)
  local phrases = {}
  for phrase in text:gmatch "[^\n]+" do
    phrases[#phrases + 1] = phrase:match "^%s*(.-)%s*$"
  end
  return phrases
end

M.qualities = list [[
  amber ancient blue bold brass brave bright broad brown calm cheap clean clever cold cool
  crisp curious dark deep dry dusty eager early empty faint fast fine firm flat fresh
  gentle giant glad golden grand green grey hollow honest hot huge humble iron jolly
  keen kind large lazy light little lively lone loud lucky modern narrow neat new
  noble odd old orange pale patient plain polite proud purple quick quiet rare red
  rich rough round royal rusty sharp short shy silent silver simple slow small smooth
  soft solid square steady stiff strange strong sweet swift tall tame thin tiny tired
  warm weak wet white wide wild wise wooden yellow young ]]

M.things = list [[
  acorn anchor anvil apple apron arrow badge bagel banjo barrel basin basket battery
  beacon bean bell belt bench berry bicycle biscuit blanket boat bolt book boot bottle
  bowl box bracelet branch brick bridge broom brush bucket buckle bulb bus button cabin
  cable cactus cage cake camera candle canoe canvas cape card carpet carrot cart castle
  chain chair chalk cherry chest chimney clock cloak cloth coat coin collar comb compass
  copper cork cotton cradle crane crate crayon crown cup curtain cushion dagger daisy
  desk dial diamond dice diary dish doll drum engine envelope fan feather fence fiddle
  flag flask flute fork fountain frame funnel garlic gate gem ginger glass globe glove
  goblet grape guitar hammer handle harp hat helmet hinge honey hook horn ink jacket
  jar jewel jug kettle key kite knife knot label ladder lamp lantern leaf lemon lens
  letter lever lid lily locket log lock magnet map marble mask medal melon mirror mitten
  mug nail napkin necklace needle net notebook nut oar onion oven paddle page pail paint
  pan paper parcel peach pear pearl pebble pen pencil pepper piano pickle pillow pin
  pipe pistol pitcher plank plate plough plum pocket poppy pot potato pouch pump puppet
  purse puzzle quill quilt radio raft rake razor ribbon ring rocket rope rose ruby rug
  ruler sack saddle sail salt sandal saucer saw scarf scissors screw shawl shell shield
  ship shoe shovel sieve skate sled slipper soap sock sofa spade spear sponge spoon
  spring stamp statue stool stove string suitcase sword table teapot tent thimble thread
  ticket tile toast tomato torch towel toy tractor trumpet trunk tube tulip umbrella
  urn vase veil violin wagon wallet watch wheel whistle wick window wire wreath zipper ]]

M.people = lines [[
  The gardener
  The baker
  Her neighbour
  A young teacher
  The old captain
  My cousin
  The night nurse
  A farmer from the hills
  The postman
  Our doctor
  The village painter
  His sister
  The librarian
  A tired traveller
  The fisherman
  The mayor
  A student
  The carpenter
  Their uncle
  The shepherd
  A singer
  The miller ]]

M.deeds = lines [[
  waited
  talked about the weather
  listened to the rain
  slept until noon
  sang an old song
  told a long story
  walked slowly
  laughed with friends
  thought of home
  watched the clouds
  had breakfast
  took a short rest
  looked for mushrooms
  counted the birds
  spoke to nobody
  came back late
  worked all morning
  waved at the children
  read the news
  whistled
  fell asleep
  asked for the way ]]

M.places = lines [[
  by the river
  near the market
  at the north end of the town
  under the trees
  behind the church
  in the garden
  on the way to the station
  beside the lake
  at the foot of the hill
  in the kitchen
  along the coast
  outside the school
  on the old road
  in the next valley
  at the harbour
  before the storm came
  after the harvest
  while the sun went down
  on a cold afternoon
  in the middle of the week
  shortly after dawn
  until the evening ]]

return M
