"""From a model and images to a collection that can be searched: what the commands about vectors and pages share.

images -> `ImageSource` (a model computes their vectors) -> an embeddings file, an index or a store
a run, a folder, an index or a store -> `Collection`, which `bier serve` shows

`bier.collection.ray` encodes on a cluster and is imported where it is asked for.
"""

from bier.collection.collection import Changes as Changes
from bier.collection.collection import Collection as Collection
from bier.collection.collection import Name as Name
from bier.collection.collection import changing as changing
from bier.collection.collection import columns as columns
from bier.collection.collection import run_folder as run_folder
from bier.collection.encoding import ImageSource as ImageSource
from bier.collection.encoding import about_model as about_model
from bier.collection.encoding import write_embeddings as write_embeddings
from bier.collection.served import KS as KS
from bier.collection.served import data_collection as data_collection
from bier.collection.served import image_collection as image_collection
from bier.collection.served import stored_collection as stored_collection
from bier.collection.summary import Summary as Summary
from bier.collection.summary import summarise as summarise
