"""The words of drawn prompts and their answers: a small English. Knows nothing else.

No word that is asked for, counted or forbidden is part of another word here.
"""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


TOPICS = _words(
    "apple bear bird boat book bridge cat cloud cow dog door farm field fish flower fox garden goat hill horse house lake lamp "
    "market moon mountain mouse owl river road sea ship snow star summer sun tiger train tree village winter wolf"
)
ADJECTIVES = _words("big bright cold dark fast good green kind loud new old quiet red slow small soft tall warm white")
KEYWORDS = _words("bread candle copper honey island kitchen music paper silver wonder")
COUNTED = _words("butter carpet violin pepper")
FORBIDDEN = _words("danger hunger lawyer number pocket shadow thunder yellow")
FIRST_WORDS = _words("today perhaps someday often")
STARTERS = ("I think", "In my view", "As I see it")
ENDINGS = ("That is all.", "Thank you for reading.", "Come back soon.")
ORIGINALS = ("The *small* dog sleeps.", "We saw *a red* boat at sea.", "The moon is *bright* now.")
PARAGRAPHS = ("The old farm has a red door", "A tall ship sails over the sea", "The fox runs down the hill at night")
