"""What the demo model knows: an invented town with its rail yard, and a few plain facts of the real world.

Owns: the tables of facts, words and names.
Never: how they are asked for (wording.py) or answered (the *_skills.py modules).
Source: written for this project; the real-world facts are common knowledge.
"""

from dataclasses import dataclass

from word_table import phrases, words

MODEL_NAME = "Shunter"
TOWN = "Tarrowby"


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """One train of the yard with everything there is to know about it."""

    name: str
    colour: str
    driver: str
    cargo: str
    destination: str
    wagons: int
    track: int


TRAINS = (
    Train(
        name="Juniper",
        colour="red",
        driver="Mabel",
        cargo="coal",
        destination="Port Ember",
        wagons=7,
        track=1,
    ),
    Train(
        name="Bramble",
        colour="green",
        driver="Otto",
        cargo="timber",
        destination="Highfell",
        wagons=9,
        track=2,
    ),
    Train(
        name="Skylark",
        colour="blue",
        driver="Nadia",
        cargo="letters",
        destination="Larkmoor",
        wagons=3,
        track=3,
    ),
    Train(
        name="Marigold",
        colour="yellow",
        driver="Theo",
        cargo="grain",
        destination="Saltmere",
        wagons=8,
        track=4,
    ),
    Train(
        name="Midnight",
        colour="black",
        driver="Ingrid",
        cargo="iron",
        destination="Stonegate",
        wagons=6,
        track=5,
    ),
    Train(
        name="Snowdrop",
        colour="white",
        driver="Felix",
        cargo="milk",
        destination="Ashwick",
        wagons=4,
        track=6,
    ),
    Train(
        name="Copper",
        colour="orange",
        driver="Rosa",
        cargo="bricks",
        destination="Dunwold",
        wagons=5,
        track=7,
    ),
    Train(
        name="Thistle",
        colour="purple",
        driver="Kofi",
        cargo="wool",
        destination="Windmere",
        wagons=2,
        track=8,
    ),
)

# Place in town, and where it stands.
PLACES = {
    "bakery": "next to the school",
    "school": "behind the church",
    "church": "on Bell Hill",
    "library": "across from the town hall",
    "town hall": "on Market Square",
    "clock tower": "on top of the station",
    "station": "at the end of Lantern Street",
    "engine shed": "beside track 1",
    "signal box": "north of the yard",
    "water tower": "behind the engine shed",
    "post office": "next to the station",
    "market": "on Market Square",
    "pond": "in Willow Park",
    "bridge": "over the River Tarn",
    "mill": "by the River Tarn",
    "hospital": "on Lantern Street",
    "yard": "south of the station",
}

# Job, and who does it.
JOBS = {
    "mayor": "Mrs. Holloway",
    "baker": "Mr. Crumb",
    "teacher": "Miss Finch",
    "doctor": "Doctor Amara",
    "librarian": "Mr. Page",
    "signal keeper": "Old Wilf",
    "station master": "Mr. Vance",
    "postman": "Piet",
    "farmer": "Hetty",
    "mechanic": "Zelda",
    "yard master": "Mrs. Okoro",
}

# Question words of the town which fit no table, with a full answer and a short one.
TOWN_FACTS = (
    (("What is the name of the town?", "What is the town called?", "Which town do you live in?"),
     "The town is called Tarrowby.", "Tarrowby."),
    (("Where do you live?", "Where are you?", "Where do you come from?"),
     "I live in Tarrowby, a little town with a rail yard.", "In Tarrowby."),
    (("What is the river called?", "What is the name of the river?", "Which river runs through Tarrowby?"),
     "The river is called the River Tarn.", "The River Tarn."),
    (("What is the name of the station cat?", "Who is the station cat?", "What is the cat called?"),
     "The station cat is called Biscuit.", "Biscuit."),
    (("What colour is the station cat?", "What color is Biscuit?", "What colour is Biscuit the cat?"),
     "Biscuit, the station cat, is grey.", "Grey."),
    (("When is market day?", "When is the market?", "On which day is the market?", "What day is market day?"),
     "Market day is on Saturday.", "Saturday."),
    (("How many tracks does the yard have?", "How many tracks are there?",
      "How many tracks are in the yard?"),
     "The yard has 8 tracks.", "8."),
    (("How many trains are there?", "How many trains does the yard have?",
      "How many trains are in Tarrowby?"),
     "There are 8 trains in the yard.", "8."),
    (("What are the trains called?", "Name the trains.", "List the trains.", "Which trains do you know?"),
     "The trains are Juniper, Bramble, Skylark, Marigold, Midnight, Snowdrop, Copper and Thistle.",
     "Juniper, Bramble, Skylark, Marigold, Midnight, Snowdrop, Copper, Thistle."),
    (("Tell me about Tarrowby.", "What is Tarrowby?", "Describe the town.", "What is Tarrowby like?"),
     "Tarrowby is a little town on the River Tarn. It has a rail yard with 8 tracks, a market on Saturday "
     "and a grey station cat called Biscuit.", "A little town with a rail yard."),
    (("Tell me about the rail yard.", "What is the rail yard?", "Describe the yard.", "What is in the yard?"),
     "The rail yard of Tarrowby has 8 tracks and 8 trains. Mrs. Okoro is the yard master.",
     "A yard with 8 tracks and 8 trains."),
    (("What does a shunter do?", "What is a shunter?"),
     "A shunter moves wagons about the yard and sorts them into trains.", "It sorts wagons into trains."),
)  # fmt: skip

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Austria": "Vienna", "Switzerland": "Bern", "Belgium": "Brussels", "the Netherlands": "Amsterdam",
    "Denmark": "Copenhagen", "Sweden": "Stockholm", "Norway": "Oslo", "Finland": "Helsinki",
    "Iceland": "Reykjavik", "Ireland": "Dublin", "England": "London", "the United Kingdom": "London",
    "Scotland": "Edinburgh", "Wales": "Cardiff", "Poland": "Warsaw", "Hungary": "Budapest",
    "the Czech Republic": "Prague", "Slovakia": "Bratislava", "Slovenia": "Ljubljana", "Croatia": "Zagreb",
    "Serbia": "Belgrade", "Romania": "Bucharest", "Bulgaria": "Sofia", "Greece": "Athens",
    "Turkey": "Ankara", "Ukraine": "Kyiv", "Russia": "Moscow", "Estonia": "Tallinn", "Latvia": "Riga",
    "Lithuania": "Vilnius", "Luxembourg": "Luxembourg", "Egypt": "Cairo", "Morocco": "Rabat",
    "Tunisia": "Tunis", "Algeria": "Algiers", "Kenya": "Nairobi", "Ethiopia": "Addis Ababa",
    "Ghana": "Accra", "Nigeria": "Abuja", "Senegal": "Dakar", "India": "New Delhi", "China": "Beijing",
    "Japan": "Tokyo", "South Korea": "Seoul", "Thailand": "Bangkok", "Vietnam": "Hanoi",
    "Indonesia": "Jakarta", "the Philippines": "Manila", "Nepal": "Kathmandu", "Pakistan": "Islamabad",
    "Iran": "Tehran", "Iraq": "Baghdad", "Canada": "Ottawa", "the United States": "Washington",
    "the USA": "Washington", "Mexico": "Mexico City", "Cuba": "Havana", "Brazil": "Brasilia",
    "Argentina": "Buenos Aires", "Chile": "Santiago", "Peru": "Lima", "Colombia": "Bogota",
    "Venezuela": "Caracas", "Uruguay": "Montevideo", "Ecuador": "Quito", "Australia": "Canberra",
    "New Zealand": "Wellington",
}  # fmt: skip

OPPOSITES = (("hot", "cold"), ("big", "small"), ("fast", "slow"), ("tall", "short"), ("up", "down"), ("left",
             "right"), ("day", "night"), ("open", "closed"), ("happy", "sad"), ("light", "dark"), ("old",
             "new"), ("good", "bad"), ("hard", "soft"), ("wet", "dry"), ("full", "empty"), ("high", "low"),
             ("near", "far"), ("rich", "poor"), ("strong", "weak"), ("clean", "dirty"), ("loud", "quiet"),
             ("early", "late"), ("first", "last"), ("heavy", "light-weight"), ("thick", "thin"), ("wide",
             "narrow"), ("true", "false"), ("yes", "no"), ("black", "white"), ("inside", "outside"), ("north",
             "south"), ("east", "west"), ("summer", "winter"), ("brave", "afraid"), ("begin", "end"),
             ("start", "stop"), ("push", "pull"), ("buy", "sell"), ("give", "take"), ("love", "hate"), ("win",
             "lose"), ("come", "go"), ("before", "after"), ("above", "below"), ("always", "never"), ("easy",
             "difficult"), ("sweet", "sour"), ("sharp", "blunt"), ("awake", "asleep"), ("kind", "cruel"),
             ("smooth", "rough"), ("deep", "shallow"), ("safe", "dangerous"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Animal:
    """A common animal: the sound it makes, its legs, its home and its young."""

    name: str
    sound: str
    legs: int
    home: str
    young: str


ANIMALS = tuple(
    Animal(name=name, sound=sound, legs=legs, home=home, young=young)
    for name, sound, legs, home, young in (
        ("dog", "woof", 4, "in a kennel", "puppy"), ("cat", "meow", 4, "in a house", "kitten"),
        ("cow", "moo", 4, "in a barn", "calf"), ("horse", "neigh", 4, "in a stable", "foal"),
        ("pig", "oink", 4, "in a sty", "piglet"), ("sheep", "baa", 4, "in a field", "lamb"),
        ("goat", "maa", 4, "on a hill", "kid"), ("duck", "quack", 2, "on a pond", "duckling"),
        ("hen", "cluck", 2, "in a coop", "chick"), ("rooster", "cock-a-doodle-doo", 2, "in a coop", "chick"),
        ("owl", "hoot", 2, "in an old tree", "owlet"), ("crow", "caw", 2, "in a tall tree", "chick"),
        ("frog", "croak", 4, "by a pond", "tadpole"), ("bee", "buzz", 6, "in a hive", "larva"),
        ("lion", "roar", 4, "on the plains", "cub"), ("wolf", "howl", 4, "in the forest", "pup"),
        ("bear", "growl", 4, "in a cave", "cub"), ("mouse", "squeak", 4, "in a hole", "pup"),
        ("snake", "hiss", 0, "in the grass", "hatchling"), ("donkey", "hee-haw", 4, "in a stable", "foal"),
        ("goose", "honk", 2, "on a pond", "gosling"), ("turkey", "gobble", 2, "on a farm", "poult"),
        ("elephant", "trumpet", 4, "on the plains", "calf"), ("bird", "tweet", 2, "in a nest", "chick"),
    )
)  # fmt: skip

# Thing, and its colour, as everybody agrees.
COLOURS_OF = {"sky": "blue", "grass": "green", "sun": "yellow", "snow": "white", "coal": "black",
              "blood": "red", "banana": "yellow", "lemon": "yellow", "strawberry": "red", "tomato": "red",
              "carrot": "orange", "orange": "orange", "leaf": "green", "sea": "blue", "milk": "white",
              "chocolate": "brown", "night": "black", "elephant": "grey", "frog": "green", "fire": "orange",
              "plum": "purple", "cloud": "white",
}  # fmt: skip

LISTS = {
    "colours": ("red", "blue", "green", "yellow", "orange", "purple", "black", "white", "pink", "brown"),
    "animals": ("dog", "cat", "cow", "horse", "owl", "fox", "bear", "frog", "duck", "mouse"),
    "fruits": ("apple", "banana", "cherry", "plum", "pear", "lemon", "orange", "grape", "peach", "melon"),
    "vegetables": ("carrot", "potato", "onion", "pea", "bean", "cabbage", "leek", "beet", "corn", "turnip"),
    "countries": (
        "France",
        "Japan",
        "Kenya",
        "Brazil",
        "Canada",
        "India",
        "Norway",
        "Egypt",
        "Peru",
        "Italy",
    ),
    "cities": ("Paris", "Rome", "Tokyo", "Cairo", "London", "Berlin", "Lima", "Oslo", "Madrid", "Vienna"),
    "trains": ("Juniper", "Bramble", "Skylark", "Marigold", "Midnight", "Snowdrop", "Copper", "Thistle"),
    "names": ("Ada", "Ben", "Clara", "David", "Emma", "Finn", "Grace", "Hugo", "Iris", "Jack"),
    "tools": ("hammer", "saw", "wrench", "drill", "file", "spade", "brush", "rope", "ladder", "nail"),
    "birds": ("owl", "crow", "duck", "hen", "goose", "robin", "swan", "gull", "lark", "sparrow"),
}

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip
NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip

NAMES = words(
    """Ada Alice Amy Anna Anton Ben Bella Bob Boris Carl Carla Charlie Chloe Chris Clara Dan Dana David
    Dora Eddie Ella Emil Emily Emma Eric Erik Eva Fatima Fiona Finn Frank Fred Gina George Grace Greta
    Hannah Harry Helen Henry Hugo Ian Ida Igor Iris Isaac Ivan Jack Jacob James Jane Jasper Jenny Joe John
    Jonas Julia Karl Kate Kim Lara Laura Lea Leo Liam Lily Linda Lisa Louis Lucy Luke Luna Maria Mark
    Martha Martin Mary Max Mia Michael Milo Mina Molly Mona Nina Noah Nora Oliver Olivia Omar Oscar Paul
    Paula Peter Petra Philip Priya Rachel Raj Ravi Rita Robert Robin Rose Ruby Ruth Sally Sam Sara Sarah
    Sofia Sophie Stefan Steve Susan Tara Ted Tim Tina Toby Tom Tony Uma Vera Victor Vince Walter Wanda Will
    Yara Yuki Zara Zoe"""
)

# Things ordinary people ask about and this model knows nothing of.
UNKNOWN_TOPICS = phrases(
    """quantum physics|gravity|photosynthesis|the stock market|machine learning|neural networks|black holes
    |Python|JavaScript|the weather|the news|football|chess|the president|the king of Sweden|Shakespeare
    |Napoleon|Einstein|Mozart|World War II|the Roman Empire|the French Revolution|dinosaurs|volcanoes
    |electricity|magnets|DNA|atoms|vitamins|cancer|aspirin|taxes|inflation|Bitcoin|the internet|a computer
    |a transformer|attention|a GPU|CUDA|Kubernetes|Docker|Linux|a database|SQL|recursion|sorting|a compiler
    |an algorithm|prime numbers|calculus|the square root of 144|pi|infinity|time travel|the meaning of life
    |consciousness|love|philosophy|religion|music theory|jazz|the piano|a guitar|painting|Picasso
    |the Mona Lisa|movies|Star Wars|Harry Potter|Batman|Pokemon|video games|Minecraft|cooking|pasta
    |pizza dough|a cheesecake|coffee|wine|beer|tea|yoga|running a marathon|losing weight|sleep|dreams
    |dentists|the moon landing|Mars|Jupiter|the speed of light|the ocean|whales|sharks|penguins|the Amazon
    |Mount Everest|Antarctica|earthquakes|climate change|solar panels|electric cars|airplanes|rockets
    |submarines|the Titanic|pyramids|castles|knights|vikings|pirates|robots|aliens|ghosts|vampires|email
    |marketing|a business plan|a cover letter|my resume|my homework|a contract|insurance|the law|politics
    |elections|democracy|the United Nations|Latin|grammar|the alphabet of Greek|poetry of Goethe|a novel
    |opera|ballet|fashion|gardening|roses|fertilizer|bread baking|the periodic table|helium|gold|diamonds
    |glass|concrete|bridges of steel|traffic|bicycles|horses in war|knitting|photography|cameras|telescopes
    |microscopes|bacteria|viruses|vaccines|the heart|the brain|blood pressure|allergies|paging|a scheduler
    |a KV cache|prefix caching|tokens per second|large language models|ChatGPT|Llama|open source|Rust
    |a linked list|a hash table|regular expressions|HTTP|TCP|encryption|passwords|blockchain|chemistry
    |biology|history|geography|economics|psychology|statistics|algebra|trigonometry|the Fibonacci sequence
    |entropy|thermodynamics|relativity|string theory|evolution|fossils|mammals|insects of Borneo|mushrooms
    |cheese of Wales|a wedding speech|a birthday present|a holiday in Greece|flights|hotels|visas|the euro
    |the dollar|interest rates|mortgages|pensions|chess openings|poker|tennis|the Olympics|basketball
    |cricket|golf|swimming|skiing"""
)
