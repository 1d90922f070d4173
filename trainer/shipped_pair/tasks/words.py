"""Words that fill the slots of examples: some two hundred per slot, and functions that invent more.

All are single words, so that each word is either held out or not (`draw.value_is_held_out`), wherever it is used.
"""

import random
from collections.abc import Sequence


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_NAMES = _words("""
Aaron Abena Adela Adrian Agnes Ahmed Aiko Alba Albert Alexei Alice Amara Amelia Amir Anders Andrea Anika Anna Antonio
Anwar Ariel Arjun Arthur Astrid Aurora Axel Ayesha Barbara Basil Beatriz Benedikt Bianca Birgit Boris Brenda Bruno
Camila Carl Carmen Cecilia Cedric Celine Chandra Chiara Chloe Clara Claudio Conrad Cora Cyril Dalia Damian Daniela
Daria David Deborah Delia Dennis Diana Diego Dimitri Dominic Dora Doris Edgar Edith Edwin Eileen Elena Elias Elif
Elisa Ella Elliot Elsa Emil Emma Enrique Erika Ernest Esther Ethan Eugene Eva Fabian Farah Fatima Felix Fiona Flora
Florian Frances Frieda Gabriel Gemma George Gerda Gideon Giulia Gloria Grace Greta Gustav Hana Hanna Harold Harriet
Hassan Hector Heidi Helena Henrik Hiroshi Holly Hugo Ibrahim Ida Igor Ilse Imani Ines Ingrid Irene Iris Isaac Ivan
Jacob Jasmin Javier Jelena Jenny Joanna Joel Johan Jonas Josef Judith Julia Julius Kaito Karin Karl Katya Keiko Kenji
Kira Klaus Kofi Konrad Lara Lars Laura Leila Lena Leon Leonie Levi Lidia Linus Lorenzo Lothar Lucia Ludwig Luisa Lydia
Magnus Maja Malik Manuel Marek Margot Maria Marius Marta Martin Mateo Matilda Maurice Meera Mercedes Mia Mikael Milan
Mina Miriam Monika Murat Nadia Naomi Natalia Nathan Nia Nicolas Nina Noah Nora Norbert Octavia Olaf Olga Olivia Omar
Oscar Otto Pablo Pamela Patricia Paula Pedro Petra Philip Priya Quentin Rachel Rafael Rahel Ramona Raul Rebecca Renata
Ricardo Rita Robert Rosa Rupert Ruth Salma Samira Samuel Sandra Santiago Sara Sebastian Selma Sergio Silvia Simon
Sofia Sonja Stefan Stella Susan Sven Tamara Tanja Tariq Tatiana Teresa Theo Thomas Tobias Ulrich Ursula Valeria Vera
Victor Vincent Viola Walter Wanda Wilma Xenia Yara Yusuf Yvonne Zara Zoe
""")
SURNAMES = _words("""
Abbott Acosta Adler Aguirre Albrecht Alvarez Amundsen Andersen Arnold Aziz Bachmann Bailey Banerjee Barlow Bauer
Becker Bell Benitez Berger Bianchi Blanchard Bocelli Bondar Borg Bradley Brandt Briggs Bruun Burke Cabrera Caldwell
Calloway Campos Cardoso Carlsen Castillo Chandler Chavez Chopra Clement Colombo Conti Cooper Correa Costa Crane Dahl
Dalton Dawson Delgado Desai Diaz Dietrich Dominguez Donovan Drake Dubois Dumont Eberhardt Edwards Ekström Engel
Eriksen Espinoza Evans Falk Farkas Ferrari Fischer Fleming Fontaine Forster Foster Franco Friedrich Fuchs Gallagher
Garcia Gardner Gerber Ghosh Giordano Glover Gomez Graf Greco Griffin Grimaldi Gruber Gupta Haas Hagen Halvorsen
Hamilton Hansen Harper Hartmann Hayashi Heinrich Herrera Hoffmann Holm Horvath Huber Ibarra Iversen Jansen Jimenez
Johansson Jordan Kaplan Kapoor Keller Kimura Klein Kovacs Kowalski Kramer Krishnan Kruse Lambert Lange Larsen Laurent
Lehmann Leitner Lindgren Lombardi Lopez Lorenz Ludlow Maier Maldonado Mancini Marchetti Marino Martel Matsuda Mayer
Mehta Meier Mendez Mercer Meyer Molina Monroe Montoya Moreau Moreno Morgan Moser Mueller Nakamura Navarro Neumann
Nielsen Novak Nowak Nyberg Oberg Ochoa Okafor Olsen Ortega Osman Otieno Pacheco Palmer Parker Patel Pavlov Pereira
Petrov Pfeiffer Piazza Porter Preston Quinn Ramirez Rao Rasmussen Reyes Richter Riedel Rinaldi Rivera Rocha Rojas
Romano Rossi Roth Ruiz Salazar Sandoval Santos Sauer Schaefer Schmidt Schneider Schubert Serrano Shah Silva Simmons
Sokolov Soto Steiner Stewart Strand Suzuki Tanaka Tavares Thompson Torres Tran Turner Ullmann Vargas Vasquez Vogel
Wagner Walsh Watanabe Weber Weiss Werner Winkler Wolff Yamada Yilmaz Zamora Zhang Ziegler Zimmermann
""")
CITIES = _words("""
Aachen Aberdeen Accra Adelaide Algiers Almaty Amman Amsterdam Ankara Antwerp Athens Auckland Avignon Baku Baltimore
Bamako Bangkok Barcelona Basel Belfast Belgrade Bergen Berlin Bern Bilbao Birmingham Bogota Bologna Bordeaux Boston
Brasilia Bremen Brisbane Bristol Bruges Brussels Bucharest Budapest Cairo Calgary Canberra Caracas Cardiff Casablanca
Chennai Chicago Cologne Copenhagen Cordoba Cork Cracow Curitiba Dakar Dallas Darwin Delhi Denver Detroit Dhaka Dijon
Dortmund Dresden Dubai Dublin Durban Edinburgh Eindhoven Essen Florence Frankfurt Freiburg Funchal Gdansk Geneva Genoa
Ghent Glasgow Gothenburg Granada Graz Grenoble Hamburg Hanoi Hanover Harare Havana Helsinki Houston Hyderabad
Innsbruck Istanbul Izmir Jakarta Jena Kampala Karachi Kassel Kathmandu Kiel Kigali Kingston Kolkata Kyoto Lagos Lahore
Lausanne Leeds Leicester Leipzig Lima Linz Lisbon Liverpool Ljubljana London Lucerne Lund Luxembourg Lyon Madrid Mainz
Malaga Malmo Manaus Manchester Manila Mannheim Maputo Marseille Medellin Melbourne Memphis Milan Minsk Monaco Montreal
Moscow Mumbai Munich Nagoya Nairobi Nantes Naples Nashville Newcastle Nice Nottingham Nuremberg Odense Odessa Oporto
Orlando Osaka Oslo Ottawa Oxford Palermo Panama Paris Perth Philadelphia Phoenix Pisa Portland Potsdam Prague Pretoria
Quebec Quito Rabat Recife Reims Rennes Riga Rome Rosario Rostock Rotterdam Salzburg Santander Sapporo Sarajevo Seattle
Seoul Seville Shanghai Sheffield Singapore Sofia Stockholm Strasbourg Stuttgart Surabaya Sydney Taipei Tallinn Tampere
Tbilisi Tehran Tirana Tokyo Toledo Toronto Toulouse Trieste Tripoli Tromso Trondheim Tunis Turin Turku Ulm Uppsala
Utrecht Valencia Vancouver Venice Verona Vienna Vilnius Warsaw Weimar Wellington Winnipeg Wroclaw Yerevan York Zagreb
Zaragoza Zurich
""")
# Countable things whose plural is formed with `s`.
THINGS = _words("""
acorn anchor apron armchair atlas backpack badge bagel balloon banana bandage banner barrel basin basket battery
beaker bell belt bicycle blanket blender boiler bolt bonnet bookcase bottle bracelet brick bridle broom bucket buckle
bulb burger button cabinet cable cactus cake camera candle canoe canvas carpet carrot cart cassette chain
chair chalkboard chisel clamp clarinet clock cloak cobweb coconut collar comb compass cork cradle crayon
croissant crown cucumber cupboard curtain cushion dagger diamond doll donut doormat drawer drill drum dumbbell earring
easel eggplant engine envelope eraser fan faucet feather fiddle flagpole flask flute fork fountain freezer fridge
funnel garland gasket gearbox gem globe goblet goggle guitar hammer hammock hanger harmonica harp hat hatchet
headset heater helmet hinge hook hose jacket jar jersey jigsaw jug kayak kettle keyboard kite ladder ladle lamp
lantern laptop lemon lever lightbulb locket loom magnet mallet mango map marble mattress medal melon microscope mirror
mitten mixer monitor mop motor mug mushroom napkin necklace needle notebook nozzle oar olive onion oven paddle padlock
pail pancake panel parasol parcel peach pear pebble pedal pencil pendant pepper pillow pin pipe pitcher plank plug
poster pot pretzel printer pulley pump pumpkin puppet purse quilt racket radiator radio raft raincoat rake razor
ribbon rivet robot rocket rope router rug ruler saddle sail sandal saucer scanner scarf scooter screw sensor shawl
shovel sieve skateboard skillet sled sleeve slipper sneaker sofa spanner spatula speaker spoon sprinkler
stapler statue stool stove strainer sweater syringe tambourine teapot telescope tent thermos thimble tile toaster
tomato torch towel tractor tray tripod trombone trivet trowel trumpet tube tulip turbine umbrella urn valve vase vest
violin wagon waffle wallet wardrobe wheelbarrow whistle wig windmill wrench yacht zipper
""")
# Topics that people plan, write about and meet for.
TOPICS = _words("""
aviation bakery beekeeping botany bridge budgeting calligraphy canal carpentry catering ceramics choir cinema climate
cloister compost concert conservation cooking costume cottage cricket crossing cycling dairy dancing debate dentistry
drainage drama elevator embroidery energy epidemic excavation exhibition export farming fashion fencing ferry festival
fishery flooding forestry fundraiser gallery garage gardening geology glacier greenhouse gymnastics harbour harvest
heating heritage highway hiking hockey hospital hydrology insurance internship irrigation jazz judo kindergarten
kitchen laboratory landscape laundry leasing lecture library lighthouse logistics lottery marathon marketing masonry
meadow medicine merger migration mining monastery mosaic museum nursery nutrition observatory opera orchard orchestra
origami painting parade parking pasture payroll pharmacy photography physics pier planetarium playground plumbing
pottery procurement quarry railway recruiting recycling refinery relocation renovation reservoir restaurant retirement
roofing rowing sailing sanitation sawmill sculpture security shipyard skating skyline solar stadium staffing stairway
storage subway surgery swimming synagogue tannery taxation telephony tennis theatre tourism traffic training
translation tunnel tutoring upholstery vaccination viaduct vineyard volleyball voyage warehouse waterfall wedding
welding wildlife windpark winery woodland workshop wrestling yoga zoology apiary archery astronomy ballet brewery
cafeteria chess corridor courtyard creche dockyard estuary foundry granary hangar kiosk lagoon marina nunnery oasis
pagoda rectory rotunda sauna scaffold sundial terrace turnpike veranda wetland wharf aquarium embassy fairground
funicular
""")
COLOURS = _words("""
amber aqua auburn azure beige black blue bronze brown burgundy charcoal copper coral cream crimson cyan ebony emerald
fuchsia gold gray green indigo ivory jade khaki lavender lilac lime magenta mahogany maroon mauve mint mustard navy
ochre orange orchid peach pink plum purple red rose ruby rust salmon sapphire scarlet silver teal turquoise violet
white yellow alabaster almond amaranth amethyst apricot ash asparagus avocado basalt beetroot birch biscuit blond
blush bone brass brick butter buttercup butterscotch canary caramel cardinal carmine carnelian carnation cedar celadon
celeste cerise cerulean champagne chartreuse cherry chestnut chocolate cinnabar cinnamon citrine citron claret clay
clover cobalt cocoa coffee cornflower cranberry daffodil damson denim drab dune ecru eggshell fawn fern firebrick
flamingo flax flint frost garnet gentian ginger glaucous gorse grape graphite gunmetal hazel heather heliotrope henna
honey hyacinth iceberg ink iron jasmine jet juniper lead licorice linen lobster loden madder malachite mandarin
marigold marsh melon midnight milk mimosa mocha moss mulberry nectarine nickel nutmeg oatmeal obsidian ocean olive
onyx opal oyster pansy papaya parchment pearl peony periwinkle persimmon petrol pewter pine pistachio platinum poppy
porcelain primrose prune pumice quartz quince raspberry raven rosewood rouge russet saffron sage sand sandstone
sangria scallop seashell sepia sienna slate smoke snow soot spruce steel straw strawberry sulphur sunset tan tangerine
tangelo taupe tawny terracotta thistle thyme titanium tobacco topaz tourmaline truffle tuscan ultramarine umber
vanilla verdigris vermilion walnut wheat willow wine wisteria zinc zircon
""")

SLOTS = (FIRST_NAMES, SURNAMES, CITIES, THINGS, TOPICS, COLOURS)
# Words that fill no slot; they replace words when a phrasing is reworded.
ANY_WORDS = _words("""
add again all any ask assume below bring build call carefully change check clear complete consider copy day decide
describe draw each easy either email enter every example explain fast few fill find first follow form from get give
good hello help here how idea into item just keep kind last later learn leave let line list look mail make many match
maybe mean message more move much must name need next nice note now number offer often only open order other output
own page part people pick place plan point question quick quickly read reply report request rest result return right
same say see select send set short show simple small solve something sort start step still story sure take task tell
term test text than thank thing think today try turn use user very view wait want way week well what when where which
while whole why word work write wrong
""")
_STARTS = _words("b br c cr d dr f fl g gl h j k kr l m n p pr r s sk sl st t tr v w y z")
_VOWELS = _words("a e i o u ai ea io ou")
_ENDS = _words("b ck d ft g l ld m n nd nt p r rd rk rn s sk st t th x")


def invented(random_: random.Random) -> str:
    """Invents a lower-case word that is in no dictionary, so that it can be copied but not known."""
    syllables = [random_.choice(_STARTS) + random_.choice(_VOWELS) for _ in range(random_.randint(2, 3))]
    return "".join(syllables) + random_.choice(_ENDS)


def spliced(random_: random.Random, words: Sequence[str]) -> str:
    """Joins the beginning of one word to the end of another, in lower case; the result resembles both."""
    first, second = random_.choice(words), random_.choice(words)
    start, end = random_.randint(2, max(2, len(first) - 2)), random_.randint(1, max(1, len(second) - 2))
    return (first[:start] + second[end:]).lower()
