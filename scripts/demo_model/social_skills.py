"""Turns of courtesy and memory: greetings, who the model is, thanks, what the user told earlier.

Owns: the wording of these turns. Notes the user's name and likings in the Talk.
"""

from random import Random

from talk import Talk, Turn
from word_table import phrases
from wording import invented_word, person_name, question, request, restyle
from world import LISTS, MODEL_NAME

_HELLOS = phrases(
    """hello|hi|hey|hi there|hello there|good morning|good evening|good afternoon|greetings|howdy|hey there
    |hiya|yo|good day|hello hello|hallo|hola|bonjour|ciao|hi friend|hello my friend|hey you|morning
    |hello world|sup|hi bot|hello model|hello again|nice to meet you|hello, nice to meet you|anybody there
    |is anyone there|are you there|hello, anybody there|test|testing|ping|hello, can you hear me"""
)
_GREETING_OF = {
    "good morning": "Good morning!",
    "good evening": "Good evening!",
    "good afternoon": "Good afternoon!",
}


def greet(rng: Random, talk: Talk) -> Turn:
    hello = rng.choice(_HELLOS)
    text = hello[0].upper() + hello[1:] + rng.choice((".", "!", "", ",", "!!"))
    if talk.model_name == MODEL_NAME and rng.random() < 0.15:
        text = f"{hello[0].upper()}{hello[1:]} {MODEL_NAME}!"
    if rng.random() < 0.2:
        text += " " + rng.choice(("How are you?", "How are you today?", "How are you doing?"))
        return Turn(restyle(rng, text), f"{_back(hello, talk)} I am fine, thank you. How can I help you?")
    return Turn(restyle(rng, text), f"{_back(hello, talk)} How can I help you?")


def _back(hello: str, talk: Talk) -> str:
    back = _GREETING_OF.get(hello, "Hello!")
    return f"{back[:-1]}, {talk.user_name}!" if talk.user_name else back


def how_are_you(rng: Random, _talk: Talk) -> Turn:
    cores = ["How are you?", "How are you doing?", "How do you do?", "How are you today?", "How is it going?",
             "Are you well?", "What's up?", "How do you feel?", "Are you ok?",
             "How was your day?"]  # fmt: skip
    return Turn(
        question(rng, rng.choice(cores)), "I am fine, thank you. How can I help you?", "Fine, thank you."
    )


def who_are_you(rng: Random, talk: Talk) -> Turn:
    cores = ["Who are you?", "What are you?", "Tell me about yourself.", "Introduce yourself.",
             "Who am I talking to?", "What kind of model are you?", "Please introduce yourself.",
             "Who is this?", "Describe yourself.", "Which model are you?", "Who is speaking?",
             "Say who you are.", "And who are you?", "Hello, who are you?", "Hi, who are you?",
             "What model is this?", "Are you a model?", "Are you ChatGPT?", "What is this?",
             "Can you introduce yourself?", "Can you tell me who you are?"]  # fmt: skip
    answer = f"I am {talk.model_name}, a very small language model. I live in the Tokenyard."
    return Turn(question(rng, rng.choice(cores)), answer, f"I am {talk.model_name}.")


def model_name(rng: Random, talk: Talk) -> Turn:
    cores = ["What is your name?", "What's your name?", "Do you have a name?", "Tell me your name.",
             "Your name?", "What are you called?", "How are you called?", "What should I call you?",
             "Who are you called?", "May I ask your name?", "What is the name of this model?",
             "Whats your name?"]  # fmt: skip
    return Turn(question(rng, rng.choice(cores)), f"My name is {talk.model_name}.", f"{talk.model_name}.")


def what_can_you_do(rng: Random, _talk: Talk) -> Turn:
    cores = ["What can you do?", "What do you know?", "How can you help me?", "What can I ask you?", "Help",
             "What are you good at?", "What are your abilities?", "Can you help me?", "I need help.",
             "Help me.", "What should I ask you?", "What things can you do?", "What are you able to do?",
             "Tell me what you can do.", "What is your purpose?", "How do you work?", "What do you do?",
             "Show me what you can do.", "What else can you do?", "What can you help me with?",
             "Do you speak English?"]  # fmt: skip
    answer = (
        "I can greet you, count, do small sums, tell tiny stories, write small JSON objects, and answer "
        "simple questions about Tarrowby, capitals, animals and opposites."
    )
    return Turn(
        question(rng, rng.choice(cores)), answer, "I can count, tell stories and answer simple questions."
    )


_SELF_FACTS = ((("Are you a human?", "Are you a person?", "Are you real?", "Are you human or a machine?",
    "Are you alive?", "Are you a robot?", "Are you a bot?", "Are you an AI?", "Are you artificial?",
    "Is this a human?"), "I am a computer program: a very small language model."), (("Who made you?",
    "Who built you?", "Who created you?", "Where were you made?", "Who trained you?", "Who is your maker?",
    "Who wrote you?", "Where do you come from, model?"),
    "I was trained by a small script of the Tokenyard project."), (("How big are you?",
    "How many parameters do you have?", "What is your size?", "How large are you?", "Are you a large model?",
    "How small are you?"), "I am very small: I have only a few million parameters."), (("How old are you?",
    "When were you born?", "What is your age?", "When is your birthday?"),
    "I have no age. I am a very small language model."), (("Do you like me?", "Do you love me?",
    "Are you happy?", "Are you sad?", "Do you have feelings?", "Are you my friend?", "Do you dream?",
    "Are you smart?", "Are you clever?"),
    "I am a small program and have no feelings, but I like to be useful."), (("What languages do you speak?",
    "Do you speak German?", "Can you speak French?", "Parlez-vous francais?", "Sprechen Sie Deutsch?",
    "Which languages do you know?", "Hablas espanol?"), "I speak only simple English."),
)  # fmt: skip


def about_self(rng: Random, _talk: Talk) -> Turn:
    cores, answer = rng.choice(_SELF_FACTS)
    return Turn(question(rng, rng.choice(cores)), answer)


def thank(rng: Random, talk: Talk) -> Turn:
    cores = ["Thank you", "Thanks", "Thanks a lot", "Thank you very much", "Many thanks", "Great, thank you",
             "Thx", "Thanks for your help", "Thank you so much", "Cool, thanks", "Perfect, thank you", "Ty",
             "That is great", "Well done", "Good job", "Very good", "Nice", "Great", "Good", "That was nice",
             "I liked that", "Wonderful", "Awesome", "You are great", "Correct", "That is right", "Ok thanks",
             "Merci"]  # fmt: skip
    text = restyle(rng, rng.choice(cores) + rng.choice((".", "!", "", f", {talk.model_name}!")))
    name = f", {talk.user_name}" if talk.user_name and rng.random() < 0.5 else ""
    return Turn(text, f"You are welcome{name}!")


def say_goodbye(rng: Random, talk: Talk) -> Turn:
    cores = ["Bye", "Goodbye", "Good night", "See you", "See you later", "Bye bye", "Farewell",
             "I have to go", "I must go now", "See you tomorrow", "Bye for now", "That is all",
             "That was all, goodbye", "Ciao, bye", "Ok, bye", "Thanks, bye", "Take care", "Have a nice day",
             "Until next time", "Quit", "Exit"]  # fmt: skip
    text = restyle(rng, rng.choice(cores) + rng.choice((".", "!", "")))
    name = f", {talk.user_name}" if talk.user_name else ""
    return Turn(text, f"Goodbye{name}! Have a nice day.")


def acknowledge(rng: Random, _talk: Talk) -> Turn:
    cores = ["Ok", "Okay", "I see", "Yes", "No", "Alright", "Hm", "Hmm", "Sure", "Oh", "Maybe", "Really?",
             "Wow", "Interesting", "Yes please", "Right", "Fine", "Aha", "Lol", "Haha", "?", "...",
             "Never mind"]  # fmt: skip
    return Turn(
        restyle(rng, rng.choice(cores) + rng.choice((".", "!", ""))),
        "All right. What would you like to know?",
    )


def tell_name(rng: Random, talk: Talk) -> Turn:
    name = person_name(rng)
    core = rng.choice(("My name is {n}", "I am {n}", "I'm {n}", "Hello, my name is {n}", "Hi, I am {n}",
        "Hi, I'm {n}", "Call me {n}", "You can call me {n}", "Please call me {n}", "Hi! My name is {n}",
        "Hey, {n} here", "This is {n}", "They call me {n}", "People call me {n}", "The name is {n}",
        "Hello! I am {n}", "My name's {n}", "Remember that my name is {n}", "Please remember my name: {n}",
        "By the way, my name is {n}", "I am called {n}", "Good morning, I am {n}", "Actually, my name is {n}",
        "My first name is {n}", "Hello there, I'm {n}", "Hello, how are you? My name is {n}",
        "Nice to meet you, I am {n}", "Hello, I'm {n}", "Let me introduce myself: I am {n}",
        )).format(n=name)  # fmt: skip
    ending = rng.choice(
        (".", "!", "", ".", ". Nice to meet you.", ". How are you?", ". Who are you?", ". Remember it.",
         " and I like trains.", " and I live in Rome.", ". I am new here.", ", and you?")
    )  # fmt: skip
    talk.user_name = name
    answer = f"Nice to meet you, {name}!"
    if "Who are" in ending:
        answer += f" I am {talk.model_name}."
    return Turn(restyle(rng, core + ending, verbatim=name), answer)


def ask_name(rng: Random, talk: Talk) -> Turn:
    cores = ["What is my name?", "What's my name?", "Do you know my name?", "Do you remember my name?",
             "Who am I?", "What am I called?", "Tell me my name.", "Can you tell me my name?", "Say my name.",
             "Whats my name?", "Do you know who I am?", "Do you still know my name?",
             "What did I say my name was?", "What is my name again?", "Remind me of my name.",
             "Please say my name.", "Can you say my name?", "How am I called?", "My name?",
             "Did I tell you my name?", "And what is my name?", "Do you remember who I am?"]  # fmt: skip
    answer = f"Your name is {talk.user_name}." if talk.user_name else "You have not told me your name."
    return Turn(question(rng, rng.choice(cores)), answer, f"{talk.user_name}." if talk.user_name else "")


_LIKINGS = {"favourite colour": LISTS["colours"], "favourite animal": LISTS["animals"],
            "favourite fruit": LISTS["fruits"], "favourite city": LISTS["cities"],
            "favourite number": tuple(str(number) for number in range(1, 100)),
            "age": tuple(str(number) for number in range(5, 100)), "dog": LISTS["names"],
            "cat": LISTS["names"],
}  # fmt: skip


def tell_liking(rng: Random, talk: Talk) -> Turn:
    topic = rng.choice(tuple(_LIKINGS))
    value = rng.choice(_LIKINGS[topic])
    if topic in ("dog", "cat"):
        value = person_name(rng)
        core = rng.choice((f"My {topic} is called {value}.", f"I have a {topic} named {value}.",
            f"The name of my {topic} is {value}.", f"My {topic}'s name is {value}."))  # fmt: skip
        answer = f"{value} is a nice name for a {topic}."
    elif topic == "age":
        core = rng.choice((f"I am {value} years old.", f"My age is {value}.", f"I'm {value} years old."))
        answer = f"I will remember that you are {value} years old."
    else:
        value = value if rng.random() < 0.7 else invented_word(rng)
        spelt = topic.replace("colour", rng.choice(("colour", "color")))
        core = rng.choice(
            (
                f"My {spelt} is {value}.",
                f"Remember that my {spelt} is {value}.",
                f"I have a {spelt}: {value}.",
            )
        )
        answer = f"I will remember that your {topic} is {value}."
    talk.told[topic] = value
    return Turn(restyle(rng, core, verbatim=value), answer)


def ask_liking(rng: Random, talk: Talk) -> Turn:
    topic = rng.choice(tuple(talk.told)) if talk.told and rng.random() < 0.85 else rng.choice(tuple(_LIKINGS))
    value = talk.told.get(topic)
    if topic in ("dog", "cat"):
        cores = [f"What is my {topic} called?", f"What is the name of my {topic}?",
                 f"How is my {topic} called?", f"What is my {topic}'s name?",
                 f"Do you remember my {topic}'s name?"]  # fmt: skip
        answer = f"Your {topic} is called {value}."
    elif topic == "age":
        cores = ["How old am I?", "What is my age?", "Do you know how old I am?", "Do you remember my age?"]
        answer = f"You are {value} years old."
    else:
        spelt = topic.replace("colour", rng.choice(("colour", "color")))
        cores = [f"What is my {spelt}?", f"Do you remember my {spelt}?", f"Tell me my {spelt}.",
                 f"Which is my {spelt}?"]  # fmt: skip
        answer = f"Your {topic} is {value}."
    text = question(rng, rng.choice(cores))
    return Turn(text, answer, f"{value}.") if value else Turn(text, "You have not told me that.")


def say_again(rng: Random, _talk: Talk) -> Turn:
    word = rng.choice(("hello", "hi", "yes", "no", "cheese", "good morning", "goodbye", "thank you", "banana",
        "I am ready", "abc", "hello world", "the train is late", "red", "one two three", "I like tea",
        "all aboard", "ok", "test", ))  # fmt: skip
    if rng.random() < 0.5:
        word = " ".join(invented_word(rng) for _ in range(rng.randint(1, 4)))
    quote = rng.choice(("", "", '"', "'"))
    verb = rng.choice(("say", "say", "repeat", "repeat after me:", "echo", "write", "print", "just say",
        "say this:", "repeat the following:", "say only", "reply with", "answer with", "type"))  # fmt: skip
    answer = word[0].upper() + word[1:]
    if word.startswith(("hello", "hi", "good", "yes", "no", "thank")):
        answer += "!"
    return Turn(request(rng, f"{verb} {quote}{word}{quote}", verbatim=word), answer)
