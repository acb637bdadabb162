"""Names of the numbers that the demo's adapters answer with."""


def _words(text: str) -> list[str]:
    return text.split()


ENGLISH = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
ENGLISH_TENS = _words("- - twenty thirty forty fifty sixty seventy eighty ninety")

GERMAN = _words(
    "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn "
    "siebzehn achtzehn neunzehn"
)
GERMAN_TENS = _words("- - zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")

DIGITS = str.maketrans("0123456789", "abcdefghij")


def english(number: int) -> str:
    """Return a number from -99 to 199 in English: ``minus twenty-eight``."""
    if number < 0:
        return f"minus {english(-number)}"
    if number >= 100:
        rest = number % 100
        return f"one hundred {english(rest)}" if rest else "one hundred"
    if number < 20:
        return ENGLISH[number]
    tens, ones = divmod(number, 10)
    return f"{ENGLISH_TENS[tens]}-{ENGLISH[ones]}" if ones else ENGLISH_TENS[tens]


def german(number: int) -> str:
    """Return a number from -99 to 199 in German: ``minus achtundzwanzig``."""
    if number < 0:
        return f"minus {german(-number)}"
    if number >= 100:
        rest = number % 100
        return f"einhundert{german(rest)}" if rest else "einhundert"
    if number < 20:
        return GERMAN[number]
    tens, ones = divmod(number, 10)
    if not ones:
        return GERMAN_TENS[tens]
    return f"{'ein' if ones == 1 else GERMAN[ones]}und{GERMAN_TENS[tens]}"


def letters(number: int) -> str:
    """Return a number with letters for its digits, from a for 0 to j for 9: ``-ci`` for -28."""
    return str(number).translate(DIGITS)
