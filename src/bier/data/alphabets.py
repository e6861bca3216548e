"""The characters that `glyphs` draws, frozen here so that the classes never depend on a font's version.

They were chosen by rendering every letter in every font that has it: a letter was left out if some font draws
it like an earlier one (Latin A, Greek Alpha, Cyrillic A), if it is a larger copy of its other case (o and O), if fewer
than two fonts have it, or if it is another letter with an accent. A test repeats that comparison.
"""

TRAINING = {
    "latin": ("ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghijkmnpqrtuyÆßæŊŒɐɕɗɚɝɠɣɤɧɬɭɮɱɲɳɸɹɺɻɽɾɿʂʃʆʇʈʊʍʎʐʑʓʔʕʖʗʛʝʞʣʤʥʦʧʨʩʪʫʬʭʮ"),
    "cyrillic": ("ЂЄЉЊЋЏБДЖЗЛЦЧШЩЪЫЬЮЯбвгджлмнфцшщъыьюђљњѣѤѦѨѪѬѮѰѱѴѸѹѺѼѾҊҍҐґҔҖҘҚҠҤҥҦҨҬҲҴҵҶҼҾӃӅӇӉӌӍӠӶӺӽԀԂԄԆԈԎԒԔԖԗԘԠԥ"),
    "armenian": "ԱԲԳԴԵԶԷԸԹԺԻԽԾԿՀՁՂՃՄՅՆՇՈՉՊՎՏՐՒՔՖբեէըթիլխծկձճմնշչպջվտփֆ",
    "canadian": "ᐂᐅᐆᐊᐋᐫᐮᐲᑉᑏᑑᑖᑧᑮᑰᑱᒅᒐᒑᒦᒧᒨᒩᒫᒼᓀᓂᓃᓄᓅᓇᓈᓓᓕᓖᓗᓙᓚᓬᓭᓯᓰᓳᓵᔅᔐᔑᔓᔕᔦᔨᔩᔪᔫᔬᔭᔮ",
}

TEST = {
    "greek": "ΓΔΞΣΦΨΩαβγδεζηθικλμνξπςστυφχωϏͰͲͳͶͻϗϘϙϚϛϝϞϟϠϡϢϣϤϦϧϨϪϬϮϷϸϺϻϼϿ",
    "georgian": ("აბგდევზთიკლმნოპჟრსტუფქღყშჩცძწჭხჯჰჱჲჳჴჵჶჸჹჺႠႡႢႣႤႥႦႧႨႩႪႫႬႭႮႯႰႱႲႳႴႵႶႷႸႹႺႻႼႽႾႿჀჁჂჃჄჅ"),
    "hebrew": "אבגדהזטיךלםמנעףפץצקרשת",
    "arabic": "ءبةتثجخدذرزسشصضطعغفقكلمنهوىيٹپڈڑژکگںھۇېڭ",
    "lao": "ກຂຄງຈຊຍດຕຖທນບປຜຝພມຢຣລວສຫອຮຯະາຽເແໂໃໄ",
    "nko": "ߌߍߎߏߐߑߒߓߔߕߖߗߘߙߚߜߝߞߟߡߢߣߤߥ",
}

# Held out in this order, whole alphabets at a time, when a share of the training classes is to be validation:
# a validation alphabet is then as foreign to the training as a test alphabet is.
VALIDATION_ORDER = ("armenian", "canadian", "cyrillic")
